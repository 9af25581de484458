"""Audit and inspect token data: find defects, count contents, detect train/validation overlap."""
