"""Proofs that a cut is right."""
