"""The planner's predictions compared with published and with measured runs."""
