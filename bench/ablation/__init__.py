"""Ablations: one part changed a cell, everything else kept, and a verdict only where the noise allows one."""
