"""The report of a record: one HTML file with sortable tables, interactive figures and raw rows."""
