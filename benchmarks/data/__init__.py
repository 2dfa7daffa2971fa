"""How fast data comes."""
