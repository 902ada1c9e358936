"""Predict a training step on a described cluster: its time, its memory and its timeline, without a device."""
