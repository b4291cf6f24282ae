"""Gathering rows of tables in host memory onto the device, by the GPU or the CPU."""
