"""What the studies share: rows, records, tables, drawing and tuning."""
