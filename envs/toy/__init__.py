"""Small environments for tests and studies: two gaps, contact maze, race, rooms, stump track."""
