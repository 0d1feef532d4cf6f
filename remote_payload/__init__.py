"""The container side of dflashctl: what is shipped to a GPU box and fills a run directory there."""
