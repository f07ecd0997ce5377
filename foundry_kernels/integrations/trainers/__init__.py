"""Trainers and other libraries around a model: callbacks that patch for the time of training, layers for the Hub."""
