"""Export a trained policy to ONNX, TorchScript, a C header or a Crazyflie app.

The exported function maps observations (in their own units) and noise to an action chunk in
[-1, 1]. There is one module per format; every export is compared with PyTorch when it is written.
"""
