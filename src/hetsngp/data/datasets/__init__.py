"""Data sets by name: where their files are expected, and their readers.

``registry`` lists and opens them; ``dataset`` describes one and says where to get what is missing. Readers:
``cifar``, ``cifar_c``, ``human_labels`` (CIFAR-10N and -10H), ``svhn``, ``places`` (Places365 and scenes),
``imagenet`` (with -A, -C, -R and -V2), ``imagenet21k``. ``synsets`` has the class lists of ImageNet,
``synthetic`` the paper's tasks in two dimensions.
"""
