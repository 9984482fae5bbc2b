"""Keras's names of losses, metrics and optimizers, so that another is refused before Keras is imported.

A test holds them to the Keras that is installed. What has to be given something to work on, as a wrapper of another
loss has, is left out.
"""

LOSSES = (
    "BCE", "BinaryCrossentropy", "BinaryFocalCrossentropy", "CTC", "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy", "CategoricalHinge", "Circle", "CosineSimilarity", "Dice", "Hinge", "Huber",
    "KLD", "KLDivergence", "LogCosh", "MAE", "MAPE", "MSE", "MSLE", "MeanAbsoluteError",
    "MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogarithmicError", "Poisson",
    "SparseCategoricalCrossentropy", "SquaredHinge", "Tversky", "bce", "binary_crossentropy",
    "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy", "categorical_hinge",
    "circle", "cosine_similarity", "ctc", "dice", "hinge", "huber", "kl_divergence", "kld", "log_cosh", "mae",
    "mape", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
    "mean_squared_logarithmic_error", "mse", "msle", "poisson", "sparse_categorical_crossentropy", "squared_hinge",
    "tversky",
)  # fmt: skip
METRICS = (
    "AUC", "Accuracy", "BCE", "BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU", "CategoricalAccuracy",
    "CategoricalCrossentropy", "CategoricalHinge", "ConcordanceCorrelation", "CosineSimilarity", "F1Score",
    "FBetaScore", "FalseNegatives", "FalsePositives", "Hinge", "IoU", "KLDivergence", "LogCoshError", "MAE", "MAPE",
    "MSE", "MSLE", "Mean", "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanIoU", "MeanSquaredError",
    "MeanSquaredLogarithmicError", "OneHotIoU", "OneHotMeanIoU", "PearsonCorrelation", "Poisson", "Precision",
    "PrecisionAtRecall", "R2Score", "Recall", "RecallAtPrecision", "RootMeanSquaredError",
    "SensitivityAtSpecificity", "SparseCategoricalAccuracy", "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy", "SpecificityAtSensitivity", "SquaredHinge", "Sum", "TopKCategoricalAccuracy",
    "TrueNegatives", "TruePositives", "acc", "accuracy", "auc", "bce", "binary_accuracy", "binary_crossentropy",
    "binary_io_u", "categorical_accuracy", "categorical_crossentropy", "categorical_hinge", "ce",
    "concordance_correlation", "cosine_similarity", "crossentropy", "f1_score", "f_beta_score", "false_negatives",
    "false_positives", "hinge", "io_u", "kl_divergence", "log_cosh_error", "mae", "mape", "mean",
    "mean_absolute_error", "mean_absolute_percentage_error", "mean_io_u", "mean_squared_error",
    "mean_squared_logarithmic_error", "mse", "msle", "one_hot_io_u", "one_hot_mean_io_u", "pearson_correlation",
    "poisson", "precision", "precision_at_recall", "r2_score", "recall", "recall_at_precision",
    "root_mean_squared_error", "sensitivity_at_specificity", "sparse_categorical_accuracy",
    "sparse_categorical_crossentropy", "sparse_top_k_categorical_accuracy", "specificity_at_sensitivity",
    "squared_hinge", "sum", "top_k_categorical_accuracy", "true_negatives", "true_positives",
)  # fmt: skip
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lion", "muon", "nadam", "rmsprop",
    "schedulefreeadamw", "sgd",
)  # fmt: skip
