"""The training core: data, models, batch arithmetic, training state, reporting, the loop and the driver's side."""
