"""Models of keras.applications are built, traced and trained on two replicas, and load as they were."""

import keras
import pytest
from conftest import QUICK, sampled

from pipeline.data import synthetic

# Of each family the smallest, and the least pixels on a side that it takes.
FAMILIES = {
    "VGG16": 32, "ResNet50": 32, "ResNet50V2": 32, "Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75,
    "MobileNet": 32, "MobileNetV2": 32, "MobileNetV3Small": 32, "DenseNet121": 32, "NASNetMobile": 32,
    "EfficientNetB0": 32, "EfficientNetV2B0": 32, "ConvNeXtTiny": 32,
}  # fmt: skip


@pytest.mark.slow
# Others in each run of CI: all of them take minutes.
@pytest.mark.parametrize("name", sampled(list(FAMILIES), 1))
def test_models_of_keras_applications_train_on_two_replicas_and_are_saved(pipeline, name):
    shape = [FAMILIES[name], FAMILIES[name], 3]
    data = {"shape": shape, "num_classes": 2, "train_examples": 6, "validation_examples": 2}
    ran = pipeline(
        *QUICK, "strategy=mirrored", "workers=2", f"model.build._target_=keras.applications.{name}",
        "+model.build.weights=null", "+model.build.classes=2", "data=synthetic",
        *(f"data.build.{key}={value}" for key, value in data.items()), "train.replica_batch=1", "train.epochs=1",
        "train.learning_rate=0.0001", timeout=600,
    ).ok()  # fmt: skip
    (folder,) = ran.run_folders
    _, (x, y) = synthetic(**data)
    loaded = keras.saving.load_model(folder / "model.keras")
    assert loaded.evaluate(x, y, verbose=0, return_dict=True)["loss"] == pytest.approx(ran.result["val_loss"], rel=1e-4)
