"""Keras `fit` on several ranks with compressed gradients: `horovodrun -np 2 python examples/keras_fit.py`."""

import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod does not work with Keras 3

import horovod.tensorflow.keras as hvd
import numpy as np
import tf_keras
from sklearn.datasets import load_digits

import hvdcomp
from hvdcomp.tensorflow.keras import PolicyCallback

hvd.init()
tf_keras.utils.set_random_seed(2)  # the same run each time
images, digits = load_digits(return_X_y=True)
images, digits = images[hvd.rank() :: hvd.size()] / np.float32(16), digits[hvd.rank() :: hvd.size()]

model = tf_keras.Sequential(
    [tf_keras.layers.Dense(128, activation="relu", input_shape=(64,)), tf_keras.layers.Dense(10)]
)
steps_per_epoch = len(load_digits().target) // hvd.size() // 32
compression = hvdcomp.Compression(
    hvdcomp.PowerSGD(rank=4),
    variables=model.trainable_variables,
    policy=hvdcomp.Accordion(low=4, high=1, interval=2),
    steps_per_epoch=steps_per_epoch,
)
optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.05, momentum=0.9), compression=compression)
model.compile(optimizer, tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(
    images,
    digits,
    batch_size=32,
    epochs=8,
    steps_per_epoch=steps_per_epoch,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), PolicyCallback(compression)],
)
