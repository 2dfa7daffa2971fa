"""Training across a slow link: several nodes on one machine, and the traffic between them"""
