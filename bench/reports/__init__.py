"""Reports of a saved run or ablation: Markdown, plots, and one HTML file that holds them all."""
