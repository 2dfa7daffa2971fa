"""Training over a slow link: several simulated nodes on one machine, and the traffic between
them"""
