"use strict";
// Text from the data goes into the page as textContent and values only, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const PER_PAGE = 60; // cards in the document at a time
  const STORE = `hetsngp-audit-${data.audit}`;
  const COLUMNS = [data.key, "given_label", "decision", "new_label"];
  const SYMBOLS = { keep: "✓ kept", change: "→", drop: "✕ dropped" };
  const rows = data.ids.map((_, row) => row);
  const flagged = data.flagged.filter(Boolean).length;
  const rowOf = new Map(data.ids.map((id, row) => [id, row]));
  const $ = (id) => document.getElementById(id);
  const cards = $("cards");

  let elsewhere = []; // what this browser remembers of examples of these data that are not on this page
  let remembers = true;
  let decisions = stored(); // row → [decision, new class or null]
  let history = []; // changes to take back, each a list of [row, earlier decision]
  let list = []; // rows that fit the filters, in order; it stays until a filter is changed
  let page = 0;
  let current = null; // row of the card that keys move from

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function bar(share) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    svg.setAttribute("class", "bar");
    svg.setAttribute("aria-hidden", "true");
    rect.setAttribute("width", `${100 * share}%`);
    rect.setAttribute("height", "100%");
    svg.append(rect);
    return svg;
  }

  const percent = (p) => (p >= 0.9995 ? "> 99.9 %" : p > 0 && p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);
  const count = (n) => n.toLocaleString("en-US");

  // --- choices ---------------------------------------------------------------------------------------------

  function stored() {
    try {
      const found = JSON.parse(localStorage.getItem(STORE) ?? "[]");
      elsewhere = found.filter(([id]) => !rowOf.has(id));
      return new Map(found.filter(([id]) => rowOf.has(id)).map(([id, ...decision]) => [rowOf.get(id), decision]));
    } catch {
      return new Map();
    }
  }

  function tell(text, isError = false) {
    const lost = "This browser does not remember choices: download them before you close the page.";
    $("status").textContent = remembers ? text : `${text} ${lost}`;
    $("status").classList.toggle("error", isError || !remembers);
  }

  function save() {
    const own = [...decisions].map(([row, decision]) => [data.ids[row], ...decision]);
    try {
      localStorage.setItem(STORE, JSON.stringify([...elsewhere, ...own]));
      remembers = true;
    } catch {
      remembers = false;
    }
    showProgress();
  }

  function apply(changes) {
    const before = changes.map(([row]) => [row, decisions.get(row)]);
    for (const [row, decision] of changes) {
      if (decision) decisions.set(row, decision);
      else decisions.delete(row);
      paint(row);
    }
    save();
    return before;
  }

  function decide(row, decision, label = null) {
    history.push(apply([[row, decision && [decision, label]]]));
    tell(`${data.names[row]}: ${decision ? said(row) : "undecided"}.`);
    $("undo").disabled = false;
  }

  const toClass = (row, label) => (label === data.given[row] ? decide(row, "keep") : decide(row, "change", label));

  function undo() {
    const last = history.pop();
    if (!last) return;
    apply(last);
    const [row] = last[0];
    const others = last.length > 1 ? ` and ${count(last.length - 1)} more` : "";
    tell(`Undone: ${data.names[row]}${others}${list.includes(row) ? "" : ", which the filters hide"}.`);
    $("undo").disabled = history.length === 0;
    if (list.includes(row)) moveTo(list.indexOf(row));
  }

  function showProgress() {
    const counted = rows.filter(shows);
    const done = counted.filter((row) => decisions.has(row)).length;
    $("decided").textContent = `${count(done)} of ${count(counted.length)} decided`;
    $("progress").max = counted.length || 1;
    $("progress").value = done;
    $("download").disabled = decisions.size === 0;
  }

  // --- choices.csv -----------------------------------------------------------------------------------------

  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);

  function download() {
    const lines = rows.filter((row) => decisions.has(row)).map((row) => {
      const [decision, label] = decisions.get(row);
      return [data.ids[row], data.labels[data.given[row]], decision, label === null ? "" : data.labels[label]];
    });
    const text = [COLUMNS, ...lines].map((line) => `${line.map(quoted).join(",")}\n`).join("");
    const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    element("a", { href: address, download: "choices.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
    tell(`choices.csv has ${count(lines.length)} ${lines.length === 1 ? "choice" : "choices"}.`);
  }

  function parse(text) {
    const lines = [[""]];
    let inside = false;
    for (let at = 0; at < text.length; at++) {
      const letter = text[at];
      const line = lines.at(-1);
      if (inside && letter === '"' && text[at + 1] === '"') line[line.length - 1] += text[at++];
      else if (letter === '"') inside = !inside;
      else if (inside || !/[,\r\n]/.test(letter)) line[line.length - 1] += letter;
      else if (letter === ",") line.push("");
      else if (letter === "\n") lines.push([""]);
    }
    return lines.filter((line) => line.some((value) => value !== "")); // spreadsheets end with lines of commas
  }

  function read(text) {
    const [heading = [], ...lines] = parse(text);
    const places = COLUMNS.map((name) => heading.indexOf(name));
    if (places.includes(-1))
      throw new Error(`the file has no column ${COLUMNS[places.indexOf(-1)]}; columns are separated by commas`);
    const known = new Map(data.labels.map((name, label) => [name, label]));
    const changes = new Map();
    let others = 0;
    lines.forEach((line, index) => {
      const [id, given, decision, chosen] = places.map((place) => line[place] ?? "");
      const row = rowOf.get(id);
      const where = `choice ${index + 1}, ${id}`;
      if (row === undefined) others += 1;
      else if (given !== data.labels[data.given[row]])
        throw new Error(`${where}: the given label is ${data.labels[data.given[row]]} here, not ${given}`);
      else if (!(decision in SYMBOLS)) throw new Error(`${where}: unknown decision ${decision}`);
      else if (decision === "change" && !known.has(chosen)) throw new Error(`${where}: unknown class ${chosen}`);
      else if (decision !== "change" && chosen !== "" && !(decision === "keep" && chosen === given))
        throw new Error(`${where}: the decision is ${decision} but there is a new_label, ${chosen}`);
      else {
        const change = [decision, decision === "change" ? known.get(chosen) : null];
        if (changes.has(row) && String(changes.get(row)) !== String(change))
          throw new Error(`${where}: there are two decisions about this example`);
        changes.set(row, change);
      }
    });
    return [[...changes], others];
  }

  async function load(file) {
    try {
      const [changes, others] = read(new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()));
      if (changes.length) history.push(apply(changes));
      $("undo").disabled = history.length === 0;
      const loaded = `${count(changes.length)} ${changes.length === 1 ? "choice" : "choices"} loaded.`;
      tell(others ? `${loaded} ${count(others)} are of examples that are not on this page.` : loaded);
    } catch (error) {
      const why = error instanceof TypeError ? "the file is not text in UTF-8" : error.message;
      tell(`Nothing was loaded: ${why}.`, true);
    }
  }

  // --- cards -----------------------------------------------------------------------------------------------

  function content(row) {
    const found = data.contents[row];
    const box = element("div", { class: "content", role: "group", "aria-label": "Content" });
    if (found === null) {
      box.append(element("span", { class: "missing" }, `this ${data.kind} cannot be read`));
    } else if (data.kind === "image") {
      const image = element("img", { alt: `Picture of ${data.names[row]}` });
      image.onload = () => image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) <= 64);
      image.src = `data:image/webp;base64,${found}`;
      box.append(image);
    } else if (data.kind === "table") {
      const cells = found.map(([name, value]) =>
        element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)));
      box.append(element("table", {}, element("tbody", {}, ...cells)));
    } else {
      box.append(found);
    }
    return box;
  }

  function action(kind, key, text, name) {
    const label = element("span", {}, text);
    const title = `${text} (key ${key})`;
    const attributes = { type: "button", class: kind, "data-action": name, "aria-keyshortcuts": key, title };
    return element("button", attributes, label, element("kbd", { "aria-hidden": "true" }, key));
  }

  function makeCard(row) {
    const [given, suggested] = [data.classes[data.given[row]], data.classes[data.suggested[row]]];
    const agrees = data.given[row] === data.suggested[row];
    // Flagged, and the given label is still the most probable single class: the next one is suggested.
    const mark = agrees || data.suggested[row] === data.top[row][0] ? "" : " ?";
    const top = data.top[row].map((label, place) =>
      element("li", {}, element("span", { class: "digit" }, String(place + 1)),
        element("span", { class: "class", title: data.classes[label] }, data.classes[label]),
        bar(data.probs[row][place]), element("span", { class: "number" }, data.probs[row][place].toFixed(2))));
    const other = element("select", { "aria-label": `Other class for ${data.names[row]}`, "data-action": "other" },
      element("option", { value: "" }, "Other class …"));
    const name = element("span", { class: "name", title: data.names[row] }, element("bdi", {}, data.names[row]));
    const labels = agrees
      ? [element("span", { title: given }, given)]
      : [element("del", { title: given }, given), " ", element("ins", { title: suggested }, `→ ${suggested}${mark}`)];
    const actions = [action("keep", "n", `Keep ${given}`, "keep")];
    if (!agrees) actions.push(action("change", "y", `Change to ${suggested}`, "accept"));
    actions.push(other, action("drop", "d", "Drop", "drop"));
    const card = element("article",
      { class: "card", tabindex: "-1", "data-row": row, "aria-label": `${data.names[row]}: ${given}` },
      content(row),
      element("div", { class: "about" },
        element("div", { class: "title" }, name, element("span", { class: "decision" })),
        element("div", { class: "labels" }, ...labels,
          element("small", {}, `wrong with probability ${percent(data.wrong[row])}`)),
        element("ol", { class: "top", "aria-label": "Most probable classes" }, ...top)),
      element("div", { class: "actions" }, ...actions));
    return card;
  }

  function fill(select) {
    if (select.length === 1)
      select.append(...data.classes.map((name, label) => element("option", { value: label }, name)));
  }

  const cardOf = (row) => cards.querySelector(`[data-row="${row}"]`);

  function said(row) {
    const [decision, label] = decisions.get(row) ?? ["", null];
    return decision === "change" ? `→ ${data.classes[label]}` : SYMBOLS[decision] ?? "";
  }

  function paint(row) {
    const card = cardOf(row);
    if (!card) return;
    const [decision, label] = decisions.get(row) ?? ["", null];
    card.dataset.decision = decision;
    card.querySelector(".decision").textContent = said(row);
    const accepted = decision === "change" && label === data.suggested[row];
    card.querySelector(".keep").setAttribute("aria-pressed", decision === "keep");
    card.querySelector(".change")?.setAttribute("aria-pressed", accepted);
    card.querySelector(".drop").setAttribute("aria-pressed", decision === "drop");
    const other = card.querySelector("select");
    const elsewhere = decision === "change" && !accepted;
    if (elsewhere) fill(other);
    other.value = elsewhere ? String(label) : "";
    other.classList.toggle("chosen", elsewhere);
  }

  function render() {
    const first = page * PER_PAGE;
    const shown = list.slice(first, first + PER_PAGE);
    cards.replaceChildren(...shown.map(makeCard));
    shown.forEach(paint);
    if (data.kind !== "image")
      for (const box of cards.querySelectorAll(".content"))
        if (box.scrollHeight > box.clientHeight) box.tabIndex = 0; // so that keys scroll it in every browser
    if (!shown.includes(current)) current = shown[0] ?? null;
    cardOf(current)?.setAttribute("tabindex", "0");
    $("none").hidden = shown.length > 0;
    const range = shown.length ? `${count(first + 1)}–${count(first + shown.length)} of ${count(list.length)}` : "0 of 0";
    for (const place of document.querySelectorAll(".range")) place.textContent = range;
    for (const button of document.querySelectorAll(".previous")) button.disabled = page === 0;
    for (const button of document.querySelectorAll(".next")) button.disabled = first + PER_PAGE >= list.length;
  }

  function turn(by) {
    page += by;
    current = list[page * PER_PAGE];
    render();
    cards.scrollIntoView({ block: "start" });
  }

  function seen(card) { // its middle is in the window, below the toolbar
    const { top, bottom } = card.getBoundingClientRect();
    return top + bottom > 200 && top + bottom < 2 * innerHeight;
  }

  function select(row) {
    cardOf(current)?.setAttribute("tabindex", "-1");
    current = row;
    cardOf(row)?.setAttribute("tabindex", "0");
  }

  function moveTo(place) {
    if (place < 0 || place >= list.length) return;
    const target = Math.floor(place / PER_PAGE);
    if (target !== page) {
      page = target;
      render();
    }
    select(list[place]);
    cardOf(current).focus();
  }

  // --- filters ---------------------------------------------------------------------------------------------

  const collator = new Intl.Collator("en", { numeric: true });
  const orders = {
    suspicion: (a, b) => a - b,
    class: (a, b) => data.given[a] - data.given[b] || a - b,
    name: (a, b) => collator.compare(data.names[a], data.names[b]) || a - b,
  };

  const shows = (row) => $("which").value === "all" || data.flagged[row];

  function searched(row) {
    const texts = data.kind === "image" ? [] : [data.contents[row] ?? []].flat(2);
    return [data.names[row], ...texts].join("\n").toLowerCase();
  }

  function refilter() {
    const wanted = $("search").value.trim().toLowerCase();
    const fits = (id, value) => $(id).value === "" || $(id).value === String(value);
    list = rows.filter((row) =>
      shows(row) && fits("given", data.given[row]) &&
      fits("suggested", data.suggested[row]) && fits("state", (decisions.get(row) ?? ["undecided"])[0]) &&
      (wanted === "" || searched(row).includes(wanted))).sort(orders[$("sort").value]);
    page = 0;
    current = list[0] ?? null;
    render();
    showCounts();
    showProgress();
  }

  function classOptions(id) {
    const labels = [...new Set(data[id])].sort((a, b) => collator.compare(data.classes[a], data.classes[b]));
    const options = labels.map((label) => element("option", { value: label }));
    $(id).append(element("option", { value: "" }, "any"), ...options);
  }

  function showCounts() { // of the examples that "Show" selects
    for (const id of ["given", "suggested"]) {
      const counts = new Map();
      for (const row of rows)
        if (shows(row)) counts.set(data[id][row], (counts.get(data[id][row]) ?? 0) + 1);
      for (const option of [...$(id).options].slice(1))
        option.textContent = `${data.classes[option.value]} (${count(counts.get(Number(option.value)) ?? 0)})`;
    }
  }

  function show(given, suggested) {
    const which = $("which").value;
    $("filters").reset();
    $("which").value = which;
    for (const [id, label] of [["given", given], ["suggested", suggested]]) {
      if (label === undefined) continue;
      if (!$(id).querySelector(`option[value="${label}"]`))
        $(id).append(element("option", { value: label }));
      $(id).value = label;
    }
    refilter();
    if (!list.length && which !== "all") { // the expected number has many examples that are not flagged
      $("which").value = "all";
      refilter();
    }
    $("review").scrollIntoView();
    focusCard();
  }

  const focusCard = () => cardOf(current)?.focus({ preventScroll: true });

  function goOn(row) { // to the next card, as after a key, so that no key changes what was just decided
    const next = list[list.indexOf(row) + 1];
    if (cardOf(next)) select(next);
    focusCard();
  }

  // --- what a person does ----------------------------------------------------------------------------------

  const acts = {
    keep: (row) => decide(row, "keep"),
    drop: (row) => decide(row, "drop"),
    accept: (row) => toClass(row, data.suggested[row]),
  };

  cards.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-action]");
    if (!button) return;
    const row = Number(button.closest(".card").dataset.row);
    if (button.getAttribute("aria-pressed") === "true") decide(row, undefined); // pressed again: undecided
    else {
      acts[button.dataset.action](row);
      if (event.detail) goOn(row); // with the mouse; a button that was pressed by a key keeps the focus
    }
  });
  cards.addEventListener("change", (event) => {
    const row = Number(event.target.closest(".card").dataset.row);
    if (event.target.value === "") decide(row, undefined);
    else toClass(row, Number(event.target.value));
    // After a choice with the mouse keys go to a card again: in the list a letter would choose another class.
    if (!typed) goOn(row);
  });
  for (const kind of ["focusin", "pointerdown"])
    cards.addEventListener(kind, (event) => {
      const card = event.target.closest(".card");
      if (card) select(Number(card.dataset.row));
      if (event.target.matches("select")) fill(event.target); // a thousand classes in sixty cards are slow
    });

  let typed = true; // keys that change a list stay with it, until Escape
  for (const place of [cards, $("filters")]) {
    place.addEventListener("keydown", (event) => {
      typed = true;
      if (event.key === "Escape") focusCard();
    });
    place.addEventListener("pointerdown", () => (typed = false));
  }

  const KEYS = { y: "accept", n: "keep", d: "drop" };
  document.addEventListener("keydown", (event) => {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key; // with Caps Lock too
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    if (key.startsWith("Arrow") && event.target.closest(".scroll, .content")) return; // they scroll there
    const card = cardOf(current);
    const place = list.indexOf(current);
    const columns = getComputedStyle(cards).gridTemplateColumns.split(" ").length;
    const steps = { ArrowLeft: -1, k: -1, ArrowRight: 1, j: 1 };
    if (card?.contains(event.target)) Object.assign(steps, { ArrowUp: -columns, ArrowDown: columns });
    const label = card && /^[1-9]$/.test(key) ? data.top[current][Number(key) - 1] : undefined;
    const deciding = card && (key in KEYS || label !== undefined);
    if (!deciding && key !== "u" && !(card && key in steps)) return;
    if (event.repeat && !(key in steps)) event.preventDefault(); // a key that is held down decides once
    else if (key === "u") undo();
    else if (!seen(card)) moveTo(place); // what cannot be seen is not decided
    else if (key in steps) moveTo(place + steps[key]);
    else {
      if (label !== undefined) toClass(current, label);
      else acts[KEYS[key]](current);
      moveTo(place + 1);
    }
    event.preventDefault();
  });

  for (const button of document.querySelectorAll(".previous")) button.addEventListener("click", () => turn(-1));
  for (const button of document.querySelectorAll(".next")) button.addEventListener("click", () => turn(1));
  for (const place of document.querySelectorAll("[data-given]"))
    place.addEventListener("click", () => show(place.dataset.given, place.dataset.suggested));
  $("undo").addEventListener("click", undo);
  $("download").addEventListener("click", download);
  $("load").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    if ($("file").files.length) await load($("file").files[0]);
    $("file").value = ""; // the same file can be chosen again
  });
  $("filters").addEventListener("change", (event) => {
    if (!typed && event.target.matches("select")) focusCard();
  });
  $("filters").addEventListener("submit", (event) => {
    event.preventDefault();
    focusCard();
  });
  $("filters").addEventListener("input", refilter);
  $("clear").addEventListener("click", () => {
    $("filters").reset();
    refilter();
  });
  addEventListener("storage", (event) => { // the same page in another tab
    if (event.key !== STORE) return;
    decisions = stored();
    list.forEach(paint);
    showProgress();
  });

  if (flagged) $("which").append(element("option", { value: "flagged" }, `flagged (${count(flagged)})`));
  $("which").append(element("option", { value: "all" }, `all listed (${count(rows.length)})`));
  classOptions("given");
  classOptions("suggested");
  refilter();
  if (elsewhere.length)
    tell(`${count(elsewhere.length)} of the choices that this browser remembers are of examples that are not on ` +
      "this page: they are not in its choices.csv.");
})();
