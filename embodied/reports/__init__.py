"""Pages, plots and tables about runs, rewards and datasets."""
