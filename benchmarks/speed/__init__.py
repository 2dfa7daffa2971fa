"""This project compared with other trainers and with the limit of its products"""
