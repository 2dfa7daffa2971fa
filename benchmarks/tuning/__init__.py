"""Models that are adapted to a task: what it takes, and what comes of it"""
