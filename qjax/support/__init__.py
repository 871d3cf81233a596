"""What every part uses and what is not about quantization: errors, names, batches of data, progress, caches.

It imports nothing of the other rooms.
"""
