"""Predictions for devices that are not here: published figures drive the controller and the memory plan."""
