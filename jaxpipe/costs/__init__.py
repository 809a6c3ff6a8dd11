"""What it costs: cost tables (plain data) and the analytic roofline."""
