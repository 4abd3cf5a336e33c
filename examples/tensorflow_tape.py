"""A resumable training loop with a gradient tape: `horovodrun -np 2 python examples/tensorflow_tape.py FOLDER`.

Every rank saves to its own path, because residuals differ between the ranks. If you start the program again with the
same folder, the training continues where it stopped, bit for bit.
"""

import os
import sys

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod does not work with Keras 3

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras
from sklearn.datasets import load_digits

import hvdcomp
from hvdcomp.tensorflow import CompressionState

hvd.init()
images, digits = load_digits(return_X_y=True)
images, digits = images[hvd.rank() :: hvd.size()] / np.float32(16), digits[hvd.rank() :: hvd.size()]

model = tf_keras.Sequential(
    [tf_keras.layers.Dense(128, activation="relu", input_shape=(64,)), tf_keras.layers.Dense(10)]
)
optimizer = tf_keras.optimizers.SGD(0.1)
optimizer.build(model.trainable_variables)
compression = hvdcomp.Compression(hvdcomp.Int4(), variables=model.trainable_variables)

manager = tf.train.CheckpointManager(
    tf.train.Checkpoint(model=model, optimizer=optimizer, compression=CompressionState(compression)),
    f"{sys.argv[1]}/rank{hvd.rank()}",
    max_to_keep=1,
)
manager.restore_or_initialize()
hvd.broadcast_variables(model.variables, root_rank=0)


@tf.function
def train_step(inputs, classes):
    with tf.GradientTape() as tape:
        outputs = model(inputs, training=True)
        loss = tf_keras.losses.sparse_categorical_crossentropy(classes, outputs, from_logits=True)
        loss = tf.reduce_mean(loss)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for start in range(0, 800, 32):
    loss = train_step(images[start : start + 32], digits[start : start + 32])
manager.save()
totals = compression.ledger.totals
if hvd.rank() == 0:
    print(f"loss {loss:.3f}, {totals.compression_factor:.1f} times fewer bytes than dense")
