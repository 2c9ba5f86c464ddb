"""Experts on several ranks: how tokens reach them and come back (`ep_implementation="flex"`)."""
