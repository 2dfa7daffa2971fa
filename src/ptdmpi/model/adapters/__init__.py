"""What trains beside a frozen model: modules of the rows that the table of parameters has for it,
and what they do inside a linear."""
