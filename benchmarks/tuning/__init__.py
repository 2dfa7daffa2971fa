"""Adapting models to a task: memory, time and losses"""
