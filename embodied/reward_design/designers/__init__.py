"""Who writes reward programs: Eureka, Text2Reward, Auto MC-Reward, a grammar."""
