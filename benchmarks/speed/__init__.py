"""This project beside other trainers and the limit."""
