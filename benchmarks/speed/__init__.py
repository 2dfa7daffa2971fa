"""This project beside plain torch and the limit."""
