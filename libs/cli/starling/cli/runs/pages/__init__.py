"""HTML pages without scripts: texts, tables, and plots as SVG."""
