"""Reward designers: Eureka, Text2Reward, Auto MC-Reward, DERL, and an evolutionary grammar."""
