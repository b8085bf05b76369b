"""Reports of measurements and simulations: figures, charts, tables and HTML pages."""
