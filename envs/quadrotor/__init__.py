"""Quadrotor with batched rigid-body dynamics: hover and go-to environments."""
