"""Actors: processes that step environments beside the process that learns.

    learner process                          actor process (one or several)
    OffPolicyLoop -> ActorPool  <- ByteRing  <-  Collector(environment, policy)
                     ActorPool  -> SharedWeights, credits, commands  ->

`ActorPool` has the interface of `training.collector.Collector`, so the training loop is the same.
"""
