"""Reward designers: Eureka, Text2Reward, Auto MC-Reward, and an evolutionary grammar."""
