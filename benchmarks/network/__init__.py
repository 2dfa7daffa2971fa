"""Training across a slow link: several nodes on one machine, and what passes between them"""
