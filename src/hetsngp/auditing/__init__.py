"""An audit of labels: the page on which a person reviews it, and the choices that come back."""
