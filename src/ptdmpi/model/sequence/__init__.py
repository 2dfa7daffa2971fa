"""How a sequence is cut over ranks: the positions of a rank, and attention across them."""
