"""Compares searchers by the front that they find per trained token, replayed on a table of trainings."""
