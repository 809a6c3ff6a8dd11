"""Looking at it: tables, Gantt charts and traces."""
