"""The LeRobotDataset v3 layout: schema, index, reader, writer, statistics and video."""
