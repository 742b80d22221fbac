"""Small environments with known answers: two gaps, contact maze, race, rooms, stump track."""
