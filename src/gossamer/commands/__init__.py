"""The commands, one file for each group. What is slow to import is imported where it is used."""
