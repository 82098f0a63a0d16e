"""The results of a check: failures, reports, their JSON and their text."""
