"""Offline RL learners (some go on online): IQL, ReBRAC, PRDC, Cal-QL, FQL, CPL, ReCOIL."""
