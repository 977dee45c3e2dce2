// Search from the file: browsers allow no workers there, so a hidden frame runs the worker's script.
// The theme's search looks for a class of this name (https://squidfunk.github.io/mkdocs-material/setup/building-for-offline-usage/).
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.document.open()
      this.inside.document.write("<!doctype html><html><head></head><body></body></html>")
      this.inside.document.close()
      // What a worker's script finds in its global scope.
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = async (...urls) => { for (const each of urls) await this.load(each) }
      this.ready = this.load(new URL(url, document.baseURI).href)
    }
    load(url) {
      return new Promise((loaded, failed) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: url, onload: loaded, onerror: failed })
        this.inside.document.head.append(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
