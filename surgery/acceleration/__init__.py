"""Kernels under models: `accelerate(model)` has one decode on the kernels of the project, `decelerate` undoes it."""

from surgery.acceleration.accelerate import Acceleration, accelerate, decelerate

__all__ = ["Acceleration", "accelerate", "decelerate"]
