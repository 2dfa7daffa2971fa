"""Adapters: small trained modules that are added to the linears of a frozen model."""
