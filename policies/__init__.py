"""Whatever acts: policies with a density here, the rest by kind."""
