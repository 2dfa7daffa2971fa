"""The generated parts of the documentation site (`make docs`): tables, lists and two pictures."""
