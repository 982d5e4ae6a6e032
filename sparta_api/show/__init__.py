"""What people see: the live view, tables, figures as JSON."""
